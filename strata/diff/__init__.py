"""What became what between two stages: files, symbols, lines, and why. For the terminal and the book."""
