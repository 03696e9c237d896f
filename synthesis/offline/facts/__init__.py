"""Real facts (countries, cities, elements, calendars …) as tables, tool code and tool servers, and a git repository."""
