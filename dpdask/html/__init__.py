"""HTML for people: tables that notebooks show of objects, and pages made from templates; every text in them is escaped."""
