"""What the façade (`ml_flashpoint.flashpoint`) is made of: tracked state, planners, signals, reports."""
