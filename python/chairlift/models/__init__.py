"""Native model code and checkpoint configurations."""
