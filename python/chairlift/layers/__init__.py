"""The parts that a transformer is made of, over ragged token axes and a paged cache."""
