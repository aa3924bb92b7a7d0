"""Health, metrics, the dashboard and explanations."""
