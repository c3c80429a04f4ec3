"""Numerical checks of every lemma, theorem and corollary of the paper; see docs/theory.md."""
