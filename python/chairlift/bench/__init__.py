"""Load on a server, what came of it, and reports: nothing here knows whose server it is."""
