//! The fuzz targets' checks over their seeds and random bytes, with the plain compiler.

#[path = "common/checks.rs"]
mod checks;

use std::path::Path;

/// Seeds of a target, each also with bytes flipped, cut and doubled.
fn smoke(target: &str, check: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/seeds")
        .join(target);
    let files = std::fs::read_dir(&folder).expect("the folder of seeds");
    let mut seeds: Vec<Vec<u8>> = files
        .map(|file| std::fs::read(file.expect("a seed").path()).expect("its bytes"))
        .collect();
    assert!(!seeds.is_empty());
    seeds.push(Vec::new());
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for seed in &seeds {
        check(seed);
        for _ in 0..300 {
            let mut data = seed.clone();
            for _ in 0..=random() % 4 {
                let at = random() as usize % (data.len() + 1);
                let bytes: Vec<u8> = match random() % 3 {
                    0 => vec![random() as u8; random() as usize % 4],
                    1 => {
                        let other = &seeds[random() as usize % seeds.len()];
                        other
                            .iter()
                            .skip(random() as usize % (other.len() + 1))
                            .take(30)
                            .copied()
                            .collect()
                    }
                    _ => vec![b"\n\r{}[]\"\\:,0n"[random() as usize % 12]],
                };
                let until = (at + random() as usize % 5).min(data.len());
                data.splice(at..until, bytes);
            }
            check(&data);
        }
    }
}

#[test]
fn sse_scan() {
    smoke("sse_scan", checks::sse_scan);
}

#[test]
fn peek_splice() {
    smoke("peek_splice", checks::peek_splice);
}

#[test]
fn bodies() {
    smoke("bodies", checks::bodies);
}

#[test]
fn assemble() {
    smoke("assemble", checks::assemble);
}
