"""Connections between peers: dial, listen, authenticate, relay, measure."""
