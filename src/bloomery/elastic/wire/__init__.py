"""Tensors between peers: codecs, and the ring over connected sockets. No names, no dialling."""
