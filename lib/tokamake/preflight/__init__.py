"""May it run? All checks that decide whether a stage may start; the dry run and jobs share them."""
