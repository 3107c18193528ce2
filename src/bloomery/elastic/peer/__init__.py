"""The parent of a peer's ranks: holds the lease, watches that they move, hands them connections."""
