"""The commands of ``eqsat-mem``, one module each: ``add`` adds the command's parser, ``run`` runs it and returns the exit status."""
