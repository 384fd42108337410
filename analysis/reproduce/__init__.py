"""What the method claims about keys, on real models: similarity by distance, the theorem's hypotheses, cost."""
