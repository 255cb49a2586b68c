"""Requests over time: slots, blocks, lengths and prefix keys, in integers; no pool is read or written here."""
