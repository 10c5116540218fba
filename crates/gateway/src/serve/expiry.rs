//! When certificates end to be valid.

use der::asn1::{AnyRef, GeneralizedTime, UtcTime};
use der::{Decode as _, Header, SliceReader, Tag, Tagged as _};
use rustls::pki_types::CertificateDer;

/// The earliest end of all, in seconds since 1970. A certificate that is not understood is passed over.
pub(super) fn earliest(chain: &[CertificateDer<'_>]) -> Option<i64> {
    let ends = chain.iter().filter_map(|certificate| end(certificate).ok());
    ends.min()
}

/// RFC 5280, 4.1: what stands before `validity` in a certificate, and its second time.
fn end(certificate: &[u8]) -> der::Result<i64> {
    let mut at = SliceReader::new(certificate)?;
    let (_certificate, _tbs) = (Header::decode(&mut at)?, Header::decode(&mut at)?);
    if matches!(Tag::peek(&at)?, Tag::ContextSpecific { .. }) {
        AnyRef::decode(&mut at)?; // version
    }
    let _serial = AnyRef::decode(&mut at)?;
    let _algorithm = AnyRef::decode(&mut at)?;
    let _issuer = AnyRef::decode(&mut at)?;
    let _validity = Header::decode(&mut at)?;
    let _begin = AnyRef::decode(&mut at)?;
    let end = AnyRef::decode(&mut at)?;
    let since_1970 = match end.tag() {
        Tag::UtcTime => end.decode_as::<UtcTime>()?.to_unix_duration(),
        _ => end.decode_as::<GeneralizedTime>()?.to_unix_duration(),
    };
    Ok(i64::try_from(since_1970.as_secs()).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn until(year: i32) -> CertificateDer<'static> {
        let mut params = rcgen::CertificateParams::new(["localhost".to_owned()]).unwrap();
        params.not_after = rcgen::date_time_ymd(year, 2, 3);
        let key = rcgen::KeyPair::generate().unwrap();
        params.self_signed(&key).unwrap().into()
    }

    #[test]
    fn the_first_to_end_counts() {
        // From 2050 on it is the other form of time. Figures of `date -u -d 2031-02-03 +%s`.
        assert_eq!(earliest(&[until(2031)]), Some(1_927_843_200));
        assert_eq!(earliest(&[until(2061)]), Some(2_874_614_400));
        assert_eq!(
            earliest(&[until(2061), until(2031), vec![0x30, 3].into()]),
            Some(1_927_843_200)
        );
        assert_eq!(earliest(&[vec![0x30, 0x80, 0, 0].into()]), None);
        let whole = until(2031);
        for length in 0..60 {
            assert_eq!(earliest(&[whole[..length].to_vec().into()]), None);
        }
    }
}
