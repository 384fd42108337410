"""What a model still knows over a compressed cache: fidelity at equal bytes, needles, RULER, long decoding."""
