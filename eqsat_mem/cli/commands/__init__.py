"""The commands of ``eqsat-mem``, a module each: ``add`` makes the command's parser, ``run`` runs it and gives the exit status."""
