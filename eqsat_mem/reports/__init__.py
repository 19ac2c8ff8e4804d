"""Reports about a plan for users: tables, explanations, timelines, the HTML page, progress."""
