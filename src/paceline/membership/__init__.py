"""How workers find each other, agree, come and go without a supervisor."""
