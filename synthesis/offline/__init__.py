"""The offline teacher: answers every teacher request by rules over real relational facts."""
