"""Scripts that make the figures and tables of the documentation; each prints its table last."""
