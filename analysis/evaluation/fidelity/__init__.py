"""Fidelity: what a model still knows after its cache was compressed, by method and by bytes."""
