"""bloomery pre-trains large language models and keeps the training alive."""

__version__ = "0.1.0"
