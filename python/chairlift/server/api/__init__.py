"""What clients ask of the model: one route a file, and what its requests and answers look like."""
