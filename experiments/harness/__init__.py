"""What every experiment uses: rows, tables, plots, published figures, and which code made a row."""
