"""`flashpoint doctor`: what a job will meet on its nodes, and between them, before it runs."""
