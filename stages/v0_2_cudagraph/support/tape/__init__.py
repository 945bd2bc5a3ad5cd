"""The tape behind `graph_tape`: `recorder` makes a `program`, `source` writes it as Python, `check` proves it."""
