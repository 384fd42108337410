"""Time and memory: rounds, attention, generation, storages, servers."""
