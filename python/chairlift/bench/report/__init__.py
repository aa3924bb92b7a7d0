"""Pages of figures, tables and plots that open without a network, wherever their numbers come from."""
