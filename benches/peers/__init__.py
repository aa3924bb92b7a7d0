"""The engines that `benches/serving.py` compares, and what it needs to do so."""
