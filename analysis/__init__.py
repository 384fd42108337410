"""Scripts that make the figures and tables of the documentation; each prints its table last.

Rooms by purpose: :mod:`~analysis.reproduce` (the method's claims about keys, and its theorem on real ones),
:mod:`~analysis.evaluation` (what a model still knows), :mod:`~analysis.benchmarks` (time and memory), and
:mod:`~analysis.tools` (what makes tables, and what looks at the code itself). ``python -m analysis`` lists them.
"""
