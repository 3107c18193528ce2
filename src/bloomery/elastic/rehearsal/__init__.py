"""The internet on one machine: peers as processes, shaped links, and seeded chaos."""
