"""Adapters to inference engines. Nothing here is imported by the core."""
