"""Another policy over recorded traffic: what fleet.decisions says was seen, decided again."""
