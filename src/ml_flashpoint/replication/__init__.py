"""Who holds copies of whom, and how those copies travel between nodes."""
