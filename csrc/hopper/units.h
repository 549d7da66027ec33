/* units.h - how the unit of a row of dq is written: as the biased exponent of a float, a byte (families/delta). */
#ifndef DHP_UNITS_H
#define DHP_UNITS_H

enum {
  NAN_UNIT = 255, /* the row is NaN; all bits are set */
  ONE_UNIT = 127
};

#endif
