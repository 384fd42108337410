"""A fuzzer: random lives of a compressed cache, step by step against a plain cache that holds every token.

``python -m tools.fuzz --seconds 60`` from the repository's root, or ``make fuzz``. What a step must amount to is said by
``oracle.py``; ``life.py`` (transformers), ``pool.py`` (pages of a server) and ``back_ends.py`` (compressors) are the
subjects, whose methods are the operations; ``draw.py`` makes random cases of them; ``drive.py`` runs cases and ``shrink.py`` makes
a failing one smaller; ``script.py`` writes it as one file that runs alone; ``watch.py`` looks after memory and threads.
"""
