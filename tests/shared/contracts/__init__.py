"""One contract class per seam. A stage subclasses each in a few lines that say how to make the thing."""
