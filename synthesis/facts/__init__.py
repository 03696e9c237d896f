"""Real relational facts (countries, cities, airports, elements, calendars …) as tables, tool code and tool servers."""
