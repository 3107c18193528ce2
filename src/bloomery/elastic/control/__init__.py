"""What peers decide together, through etcd: who is there, which attempt, which commit."""
