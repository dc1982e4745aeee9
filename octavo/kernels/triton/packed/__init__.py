"""Products with quantised weights that stay packed."""
