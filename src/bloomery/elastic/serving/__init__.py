"""The state of the run for newcomers: served in ranges, fetched from several peers at once."""
