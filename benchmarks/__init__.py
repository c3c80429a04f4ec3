"""Speed, memory and interval widths, side by side with the alternatives: `make bench`."""
