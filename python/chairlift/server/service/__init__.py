"""What all routes stand on: the engine served, places in its queue, one request at work, answers and errors."""
