"""Parts that all experiments use: rows, tables, plots, published figures, and marks of the code that made a row."""
