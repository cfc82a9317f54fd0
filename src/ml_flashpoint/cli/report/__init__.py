"""`flashpoint report`: what events tell of a job, as one page."""
