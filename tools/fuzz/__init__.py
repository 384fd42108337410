"""A fuzzer: random lives of a compressed cache, step by step against a plain cache that holds every token.

``make fuzz``, or ``python -m tools.fuzz --seconds 60`` from the repository's root. ``oracle.py`` says what a step must
amount to. The subjects are ``life.py`` (a CentroidCache in a transformers model), ``pool.py`` (a server's pages) and
``back_ends.py`` (compressors); their methods are the operations. ``draw.py`` makes random cases, ``drive.py`` runs one,
``shrink.py`` makes a failing one smaller, ``script.py`` writes it as one file that runs alone, ``watch.py`` looks after
memory and threads. ``__main__.py`` is the command, ``work.py`` the process that it starts and looks after.
"""
