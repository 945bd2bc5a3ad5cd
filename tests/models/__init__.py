"""Tiny seeded models the suite makes for itself (DESIGN §7)."""
