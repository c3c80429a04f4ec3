"""The shared engine: sampling completions and the scores of what was sampled."""
