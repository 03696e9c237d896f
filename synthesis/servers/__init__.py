"""Tool servers: collected from MCP servers, registries and OpenAPI documents, and brought to one form."""
