"""One module for each experiment: configuration -> cells, cell -> rows."""
