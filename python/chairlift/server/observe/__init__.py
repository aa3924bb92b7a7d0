"""What people and machines look at: probes, explanations, the dashboard."""
