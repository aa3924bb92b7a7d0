"""HTML reports with tables and plots that need no network."""
