"""How the stages descend from one another and from history: symbols, the lineage table, keeping copies equal."""
